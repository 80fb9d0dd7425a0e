"""One run of the demo, from the model file to the table."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from tqdm import tqdm

from pagedkv.demo import report
from pagedkv.demo.config import Config
from pagedkv.demo.console import Transcript, picture
from pagedkv.demo.engine import Engine, Work
from pagedkv.demo.errors import DemoError
from pagedkv.demo.loading import ModelFile, make_stores, say
from pagedkv.demo.model import Gemma3
from pagedkv.demo.prompts import PROMPTS
from pagedkv.demo.tier import tier_of
from pagedkv.demo.tokenizer import Tokenizer
from pagedkv.demo.verify import compare
from pagedkv.serving import Request, Scheduler


def run(options: argparse.Namespace) -> int:
    """Loads, serves, reports and, if asked to, verifies. See `cli.run`."""
    texts = options.prompt or PROMPTS
    file = ModelFile(options.model)
    tokenizer, config = file.tokenizer, file.config
    # Everything that can be refused is refused before the weights are read.
    prompts = [tokenizer.encode(text) for text in texts]
    size = options.block_size
    n_blocks = options.blocks or sum(-(-(len(prompt) + options.max_tokens) // size) for prompt in prompts)
    stores = make_stores(config, n_blocks, options)
    with tier_of(options, file, stores) as tiered:
        # All of them fit to their end, unless somebody said how much room there is.
        spare: dict[str, Any] = {} if options.blocks or options.memory else {"watermark": 0.0}
        scheduler = Scheduler(
            stores, max_running=len(prompts), share_prefixes=not options.no_share, tiered=tiered, **spare
        )
        for number, prompt in enumerate(prompts, 1):
            _check(scheduler, number, prompt, options, config)
        model = file.load()
        del file  # the quantised bytes

        engine = Engine(model, scheduler, tokenizer.stop_tokens, tiered)
        requests = [engine.submit(prompt, options.max_tokens) for prompt in prompts]
        transcript = Transcript(sys.stdout, tokenizer, texts, partial(picture, stores) if options.watch else None)
        started = time.perf_counter()
        try:
            firsts = [moment - started for moment in _serve(engine, scheduler, requests, transcript)]
            seconds = time.perf_counter() - started
        finally:
            engine.close()
        private = report.private_bytes(config, [len(prompt) + options.max_tokens for prompt in prompts])
        say(report.table(engine, scheduler, seconds, firsts, private, tiered))
    if not options.verify:
        return 0
    same = _verify(model, tokenizer, prompts, requests, engine.decode)
    # Narrower K/V are other numbers, which may lead to other tokens: how many is for the user to see.
    return 0 if same or options.kv_dtype != "float32" else 1


def _check(
    scheduler: Scheduler, number: int, prompt: Sequence[int], options: argparse.Namespace, config: Config
) -> None:
    if len(prompt) + options.max_tokens > config.context_length:
        raise DemoError(
            f"prompt {number}: {len(prompt)} tokens and {options.max_tokens} new ones"
            f" are more than the model's context of {config.context_length}"
        )
    try:
        scheduler.check_fits(len(prompt), options.max_tokens)
    except ValueError as error:
        raise DemoError(f"prompt {number}: {error}") from error


def _serve(
    engine: Engine, scheduler: Scheduler, requests: Sequence[Request], transcript: Transcript
) -> list[float]:
    """Computes all of them; returns when each got its first token."""
    index_of = {request: index for index, request in enumerate(requests)}
    firsts = []
    while not scheduler.is_idle:
        for request in engine.step():
            if request.n_generated == 1:
                firsts.append(time.perf_counter())
            transcript.add(index_of[request], request.tokens[-1])
            if request.finish_reason:
                transcript.end(index_of[request])
        transcript.refresh({index_of[request] for request in scheduler.running})
    transcript.close()
    return firsts


def _verify(
    model: Gemma3, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]], requests: Sequence[Request], together: Work
) -> bool:
    """Decodes every prompt alone; returns whether all have the tokens that they have alone."""
    alone = Work()
    mismatches = 0
    pairs = list(zip(prompts, requests, strict=True))
    for number, (prompt, request) in enumerate(tqdm(pairs, desc="verifying", leave=False, disable=None), 1):
        mismatch = compare(model, prompt, request.generated, alone)
        if mismatch is not None:
            mismatches += 1
            expected, got = (tokenizer.piece(token) for token in (mismatch.expected, mismatch.got))
            tqdm.write(
                f"prompt {number}: token {mismatch.place} should be {expected!r}, is {got!r};"
                f" their logits are {mismatch.margin:.1e} apart",
                file=sys.stderr,
            )
    say(f"verified: {len(pairs) - mismatches} of {len(pairs)} prompts have the tokens that they have alone")
    if alone.rate:
        gain = together.rate / alone.rate
        say(f"one after the other they decode at {alone.rate:.1f} tokens/s; together at {gain:.1f} times that")
    return mismatches == 0
