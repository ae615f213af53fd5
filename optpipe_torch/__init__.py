"""What the commands need of torch beyond the replay: profiles, estimates, models, ranks, one device on its own."""
