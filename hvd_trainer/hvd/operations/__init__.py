"""The operations of `hvd.mpi_ops`, one kind a module."""
