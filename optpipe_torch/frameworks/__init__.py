"""Models and engines of training frameworks around the replay: transformers, torchtitan."""
