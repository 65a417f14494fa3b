"""
The HTTP API of a frontend: parse, call one verb of a lower folder, render. No SQL and no policy here.

Reading order:
    ``errors.py``        pure: every error a client can see, and what each exception becomes
    ``validation.py``    pure: a JSON body -> a typed request, or the field at fault
    ``routing.py``       pure: method and path -> route
    ``multipart.py``     pure: a form's bytes -> its parts
    ``auth.py``          pure: keys, registration token, node token
    ``call.py``          one request as the routes see it, and what they may answer
    ``form.py``          a form with a file, as it arrives;  ``discard.py``  the rest of a body nobody wants
    ``render.py``        answers and errors onto the wire
    ``sse.py``           an event stream that waits for a slow reader
    ``readiness.py``     the checks behind ``/readyz``
    ``resource.py``      find the route, check the caller, run it, answer
    ``openai/``          OpenAI's shapes
    ``node_objects.py``  nodes, replicas and rules as JSON values
    ``node_service.py``  what nodes say of themselves: ``/api/node/*``
    ``nodes.py``, ``scheduling.py``, ``loads.py``, ``probes.py``  what operators ask
    ``seams.py``, ``api.py``, ``site.py``  what it all works with, and the site made of it

::

    request --routing--> Route --auth--> run(Call) --> Json | Empty | Streamed --render--> response
                                            | raised
                                            +--> errors.api_error_of --> envelope, or a frame in the open stream
"""
