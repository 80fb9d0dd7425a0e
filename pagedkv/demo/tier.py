"""What was computed, kept for the next start: `--tier`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

from pagedkv import ModelStores
from pagedkv.demo.errors import DemoError
from pagedkv.demo.loading import ModelFile
from pagedkv.tiers import FileTier, TieredPrefixes


@contextmanager
def tier_of(options: argparse.Namespace, file: ModelFile, stores: ModelStores) -> Iterator[TieredPrefixes | None]:
    """The stores' prefix cache with the folder that the options name behind it; None if they name none.

    DemoError: the folder is something else, or cannot be used.
    """
    if options.tier is None:
        yield None
        return
    try:
        tier = FileTier(options.tier, max_bytes=options.tier_size)
    except ValueError as error:
        text = str(error)
        raise DemoError(f"--tier{'-size' * text.startswith('max_bytes')}: {text.partition(': ')[2]}") from error
    except OSError as error:
        raise DemoError(f"--tier: {options.tier}: {(error.strerror or str(error)).lower()}") from error
    with tier, TieredPrefixes(stores.prefixes, tier, model=file.identity()) as tiered:
        yield tiered
