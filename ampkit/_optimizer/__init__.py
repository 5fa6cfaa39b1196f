"""The update of the parameters, all of it on the device: loss scale, norm, clip, skip, averages."""
