"""Programs that use torch.distributed themselves: DistributedDataParallel, fully_shard, DTensor."""
