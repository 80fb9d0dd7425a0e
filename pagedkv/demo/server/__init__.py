"""The demo behind HTTP, as OpenAI's clients speak it: `python -m pagedkv demo --serve 8000`.

Read it from the inside out:

    worker.py    one thread that computes; everybody else hands it jobs and is called back
    text.py      a job's tokens as text, up to a stop string
    protocol.py  what a body may ask for, and the answers
    errors.py    the answers to what cannot be done
    app.py       the ASGI application: one client's request from body to last byte
    metrics.py   what Prometheus reads
    run.py       the process: socket, model, signals
"""
