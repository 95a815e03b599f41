"""Other ways to train on many processes, each as its documentation recommends; in an environment of their own."""
