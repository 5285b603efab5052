"""Groups for tensors of devices: through the host's memory, or over communicators that can be aborted."""
