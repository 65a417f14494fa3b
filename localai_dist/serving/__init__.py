"""
One request's way: from a model's name to the answer of a backend on some node.

Reading order:
    ``seams.py``       what this folder needs of the registry, the loads and the ways to a node (protocols)
    ``replicas.py``    pure: which of several loaded replicas to try first
    ``steps.py``       pure: what to do after a failed attempt (drop the row, try another, wait, give up)
    ``sampling.py``    pure: a request's wishes and the model's defaults -> the contract's ``PredictOptions``
    ``schemas.py``     pure: a JSON schema -> a grammar that keeps an answer to it;  ``grammar.py``  the notation
    ``deadline.py``    a coroutine that ends at an instant; a pause on a clock
    ``errors.py``, ``failures.py``  what serving says no to; a failed call as an exception
    ``connector.py``   a channel to a backend over its node's tunnel
    ``lease.py``       the right to use one replica: in-flight count and channel, each returned exactly once
    ``received.py``    files that came with requests, on this frontend;  ``lent.py``  one of them on nodes, and back
    ``generation.py``  a running answer, pulled reply by reply
    ``inference.py``   the loop that ties these together
    ``watch.py``       the models folder, read anew twice a second

::

    name --watch--> ModelConfig --replicas--> warm replica --lease--> channel --call--> reply, reply, ...
                                     | none                   | failed
                                     +--> Loads.ensure        +--> steps: drop row / other / wait / give up

Cancelling any coroutine of this folder cancels the call on the backend and returns the lease.
"""
