"""hvd_trainer in forms that its own jobs do not have: without its Trainer, and on another model."""
