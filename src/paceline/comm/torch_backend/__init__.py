"""Shared memory as a back end of torch.distributed, init_process_group("paceline"): what DDP, fully_shard and DTensor
call; imports comm.shared_memory and comm.elastic.
"""
