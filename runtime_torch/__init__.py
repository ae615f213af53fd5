"""Replay of a schedule file on torch.distributed.pipelining."""
