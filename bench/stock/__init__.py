"""Plans against what users pick today, on one model, in the same processes, by one meter: `python -m bench.stock`."""
