"""Ways to a profile that need no torch: a few numbers, a run's trace, data sheets of GPUs and model configurations."""
