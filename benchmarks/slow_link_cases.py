"""What `slow_link.py` runs: engines, compressions, passes per step and links, as a list of single trainings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

from hvd_trainer.backends import EngineOptions, create
from hvd_trainer.errors import OptionError
from hvd_trainer.utils.text import plural

Backend = Literal["horovod", "ddp"]
Compression = Literal["none", "fp16", "bf16", "powersgd"]
Images = Literal["mnist", "digits"]
BACKENDS: tuple[Backend, ...] = ("horovod", "ddp")
COMPRESSIONS: tuple[Compression, ...] = ("none", "fp16", "bf16", "powersgd")
WARM_UP, POWERSGD_WARM_UP = 4, 12
"""Steps that do not count. PowerSGD sends its first 10 as they are."""


class Link(NamedTuple):
    """Between any two hosts."""

    mbit: float | None
    """each way, in Mbit/s; None: as fast as the kernel copies"""
    delay_ms: float
    """each way: an answer takes twice as long"""

    @classmethod
    def parse(cls, text: str) -> Link:
        """Reads `100/20`.

        Raises:
            ValueError: it is not of that form.
        """
        mbit, delay_ms = map(float, text.split("/"))
        if mbit <= 0 or delay_ms < 0:
            raise ValueError(text)
        return cls(mbit, delay_ms)

    def __str__(self) -> str:
        return "no limit" if self.mbit is None else f"{self.mbit:g} Mbit/s, {self.delay_ms:g} ms"


FAST = Link(None, 0.0)
FIT_LINKS = (Link(1000.0, 1.0), Link(200.0, 5.0), Link(100.0, 0.0))
FIT_HOSTS = 3


class Case(NamedTuple):
    """One training, in plain JSON."""

    backend: Backend
    compression: Compression
    accumulation: int
    """passes per step"""
    hosts: int
    ranks_per_host: int
    mbit: float | None
    delay_ms: float
    width: int
    """of the model's hidden layers"""
    batch_size: int
    """per rank and pass"""
    samples: int
    """of an epoch"""
    steps: int | None
    """it ends after so many; None: after one epoch, when the loss is taken"""
    exchange: bool
    images: Images

    @property
    def link(self) -> Link:
        return Link(self.mbit, self.delay_ms)

    @property
    def ranks(self) -> int:
        return self.hosts * self.ranks_per_host

    @property
    def warm_up(self) -> int:
        """Steps at the beginning that do not count."""
        return POWERSGD_WARM_UP if self.compression == "powersgd" else WARM_UP

    def __str__(self) -> str:
        where = f"{plural(self.hosts, 'host')}, {self.link if self.exchange else 'nothing exchanged'}"
        return f"{self.backend}, {self.compression}, {plural(self.accumulation, 'pass', 'passes')}, {where}"

    def arguments(self, seed: int) -> list[str]:
        """The job's options."""
        wanted: dict[str, Any] = {
            "backend": self.backend,
            "compression": self.compression,
            "accumulate": self.accumulation,
            "width": self.width,
            "batch-size": self.batch_size,
            "samples": self.samples,
            "dataset": self.images,
            "epochs": 1,
            "seed": seed,
            **({} if self.steps is None else {"max-steps": self.warm_up + self.steps}),
            **({} if self.exchange else {"leave-out": "exchange"}),
        }
        return [word for name, value in wanted.items() for word in (f"--{name}", str(value))]

    def on(self, link: Link, steps: int | None) -> Case:
        """The same over another link."""
        return self._replace(mbit=link.mbit, delay_ms=link.delay_ms, steps=steps)

    @property
    def to_the_end(self) -> Case:
        """The same where the loss is taken."""
        return self.on(FAST, None)

    def alone(self, steps: int) -> Case:
        """The same with nothing exchanged, so that neither link nor compression matters."""
        return self.on(FAST, steps)._replace(compression="none", exchange=False)


@cache
def is_offered(backend: Backend, compression: Compression) -> bool:
    """Whether the engine has it."""
    try:
        create(EngineOptions(backend=backend, compression=compression), {})
    except OptionError:
        return False
    return True


@dataclass(frozen=True)
class Plan:
    """All that is measured."""

    hosts: tuple[int, ...]
    ranks_per_host: int
    links: tuple[Link, ...]
    """beside one without limits, on which the loss is taken: no link changes it"""
    backends: tuple[Backend, ...]
    compressions: tuple[Compression, ...]
    accumulations: tuple[int, ...]
    width: int
    batch_size: int
    samples: int
    steps: int
    """that count, but where the loss is taken"""
    images: Images = "mnist"

    def case(self, backend: Backend, compression: Compression, accumulation: int, hosts: int) -> Case:
        """That on the fast link, to the end of the epoch."""
        where = (hosts, self.ranks_per_host, *FAST, self.width)
        data = (self.batch_size, self.samples)
        return Case(backend, compression, accumulation, *where, *data, None, exchange=True, images=self.images)

    def rows(self) -> Iterator[Case]:
        """The table's rows, each by its training on the fast link; also those that an engine does not have."""
        for hosts in self.hosts:
            for backend in self.backends:
                for accumulation in self.accumulations:
                    for compression in self.compressions:
                        yield self.case(backend, compression, accumulation, hosts)

    def table_cases(self) -> Iterator[Case]:
        """What fills the table."""
        for row in self.rows():
            if is_offered(row.backend, row.compression):
                yield row.alone(self.steps)
                yield row
                yield from (row.on(link, self.steps) for link in self.links)

    def fit_cases(self) -> Iterator[Case]:
        """Others for who fits a model of costs: more links, half the width, more hosts; nothing compressed."""
        for backend in self.backends:
            first = self.case(backend, "none", 1, self.hosts[0])
            half = first._replace(width=self.width // 2)
            more = first._replace(hosts=FIT_HOSTS)
            yield from (first.on(link, self.steps) for link in FIT_LINKS)
            yield half.alone(self.steps)
            yield from (half.on(link, self.steps) for link in (FAST, *self.links, *FIT_LINKS))
            yield more.alone(self.steps)
            yield from (more.on(link, self.steps) for link in (FAST, *self.links, *FIT_LINKS[1:2]))

    def cases(self, *, fit: bool) -> list[Case]:
        """Each once; the further ones only where they are wanted."""
        return list(dict.fromkeys([*self.table_cases(), *(self.fit_cases() if fit else ())]))
