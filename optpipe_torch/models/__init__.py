"""The models that `profile` and `run` build: known architectures, a function of the user, and their data."""
