"""
What can be served: the YAML files of a models folder, as typed values. Pure: text in, values out.

Reading order:
    ``errors.py``    what can be wrong with a model file
    ``model.py``     ``ModelConfig`` and its parts; which files belong to a model
    ``revision.py``  the hash of a config's meaning
    ``words.py``     complaints of the libraries, in an operator's words
    ``loader.py``    YAML text -> plain values, bounded
    ``parse.py``     one YAML text -> one ``ModelConfig``
    ``snapshot.py``  all texts of a folder -> ``Snapshot``: what is served, and what is wrong

::

    tiny-facts.yaml --parse--> ModelConfig --revision--> "9f2c..."
    other.yaml      --parse--> BadModelFile                       } Snapshot(models, problems)

A weights file without a YAML that names it is not served. Reading the folder is ``serving/watch.py``'s work.
"""
