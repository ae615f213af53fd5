"""Published figures of GPUs, and configurations of models, from which a profile is derived without the hardware."""
