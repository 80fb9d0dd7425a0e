"""A small CPU server loop for Gemma 3, on NumPy and pagedkv: `python -m pagedkv demo`.

Read it from the inside out:

    scheduler.py   who computes what next: queue, admission, sharing, sending back
    kv.py          the model's K/V in two stores, and the forward pass as a transaction
    engine.py      the loop: plan, compute, hand out tokens; sampling.py: how they are chosen
    model.py       Gemma 3 in NumPy; config.py: its shape
    gguf_file.py   the weights; tokenizer.py: the text
    verify.py      the same tokens the simple way
    loading.py     from a model file to all of these
    app.py         one run; cli.py: its options; console.py, report.py: what it shows
    server/        the same behind HTTP
"""
