"""
OpenAI's shapes: what its clients send and expect.

Reading order:
    ``requests.py``   pure: the bodies, validated
    ``pictures.py``   pure: a picture in a chat
    ``answers.py``    pure: completions, chunks, embeddings and model lists as JSON values
    ``text.py``       pure: bytes of replies -> text, tokens -> usage and finish reason
    ``streaming.py``  a generation onto an event stream
    ``transcripts.py``  pure: what was heard, in each form;  ``audio.py``  the route of recordings
    ``routes.py``     the routes

::

    body --requests--> wish --sampling--> PredictOptions --Inference--> Reply, Reply ... --answers--> JSON | SSE
"""
