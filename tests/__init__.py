"""The tests mirror megatron/ folder by folder; with this file `tests.forkrun` imports beside any
other `tests`."""
