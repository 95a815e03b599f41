"""Kill a training again and again, and prove that nothing was lost."""
