"""A small CPU server loop for Gemma 3, on NumPy and pagedkv: `python -m pagedkv demo`.

Who computes what next, and on which blocks, is `pagedkv.serving`. Read the rest from the inside out:

    engine.py      a step of everything that runs; sampling.py: how tokens are chosen
    model.py       Gemma 3 in NumPy; config.py: its shape
    gguf_file.py   the weights; tokenizer.py: the text
    verify.py      the same tokens the simple way
    loading.py     from a model file to all of these
    app.py         one run; cli.py: its options; console.py, report.py: what it shows
    server/        the same behind HTTP
"""
