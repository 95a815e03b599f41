"""The tools behind `python -m hvd_trainer <tool>`: what surrounds a training job."""
