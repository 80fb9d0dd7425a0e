"""The demo behind HTTP, as OpenAI's clients speak it: `python -m pagedkv demo --serve 8000`.

Read it from the inside out:

    worker.py      one thread that computes; the event loop hands it jobs and is called back
    text.py        a job's tokens as text, up to a stop string
    protocol.py    what a body may ask for, and the objects of an answer
    completion.py  one client's request: its jobs, and their text as an answer or a stream
    app.py         the ASGI application around it; errors.py: what cannot be done
    metrics.py     what Prometheus reads
    run.py         the process: socket, model, signals
"""
