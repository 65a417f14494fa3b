"""
OpenAI's shapes: what its clients send and expect.

Reading order:
    ``requests.py``   pure: the bodies, validated
    ``pictures.py``   pure: a picture in a chat;  ``tools.py``  the tools of one;  ``formats.py``  JSON as its answer
    ``text.py``       pure: replies -> text, thoughts, tool calls, usage and finish reason
    ``calls.py``      pure: tool calls, numbered and named once;  ``likely.py``  how likely each token was
    ``answers.py``    pure: completions, chunks, embeddings and model lists as JSON values
    ``streaming.py``  a generation onto an event stream
    ``transcripts.py``  pure: what was heard, in each form;  ``audio.py``  the route of recordings
    ``routes.py``     the routes

::

    body --requests--> wish --sampling--> PredictOptions --Inference--> Reply, Reply ... --answers--> JSON | SSE
"""
