"""Data for one rank: which samples it takes, and how it loads them."""

from hvd_trainer.data.batch import Batch, mean_samples, samples_in, samples_taken
from hvd_trainer.data.batch_source import BatchSource
from hvd_trainer.data.comparison import check_same_data
from hvd_trainer.data.data_loader import DrawnBatches, draw_batches
from hvd_trainer.data.dataset import Normalise, TensorData
from hvd_trainer.data.factory import make_loader
from hvd_trainer.data.loader import DataShard, Loader, LoaderPlan
from hvd_trainer.data.per_node import once_per_node

__all__ = [
    "Batch",
    "BatchSource",
    "DataShard",
    "DrawnBatches",
    "Loader",
    "LoaderPlan",
    "Normalise",
    "TensorData",
    "check_same_data",
    "draw_batches",
    "make_loader",
    "mean_samples",
    "once_per_node",
    "samples_in",
    "samples_taken",
]
