"""Shared memory as a back end of torch.distributed, init_process_group("paceline"), for DDP, fully_shard and DTensor.
May import comm.shared_memory and comm.elastic.
"""
