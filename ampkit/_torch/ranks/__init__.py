"""Process groups, DistributedDataParallel and `fully_shard`."""
