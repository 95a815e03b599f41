"""A job's store: what its ranks share once they have found each other, and nobody else reads or writes."""
