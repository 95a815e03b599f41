"""Data for one rank: which samples it takes, and how it loads them."""

from hvd_trainer.data.batch import Batch, samples_in
from hvd_trainer.data.dataset import Normalise, TensorData
from hvd_trainer.data.imdb import TextOptions, Texts, load_texts
from hvd_trainer.data.loader import Loader, LoaderPlan, Share
from hvd_trainer.data.make import make_loader
from hvd_trainer.data.mnist import ImageOptions, Images, load_images
from hvd_trainer.data.once import once_per_node

__all__ = [
    "Batch",
    "ImageOptions",
    "Images",
    "Loader",
    "LoaderPlan",
    "Normalise",
    "Share",
    "TensorData",
    "TextOptions",
    "Texts",
    "load_images",
    "load_texts",
    "make_loader",
    "once_per_node",
    "samples_in",
]
