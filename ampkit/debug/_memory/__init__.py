"""What holds the memory of a training step: recorded as it runs, or forecast without its device."""
