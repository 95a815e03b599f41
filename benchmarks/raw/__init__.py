"""What hvd_trainer is measured against: the same jobs without it, as small scripts."""
