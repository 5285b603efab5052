"""The process groups of one worker: data, shard, tensor, pipeline, context and expert parallel, and its device;
imports no other room of `worker`.
"""
