"""
Attacks: small edits that break one rule each, with the tests they must redden and those they must leave green.

A rule without an attack that reddens its test is not proven. ``python -m tests.attacks [NAME ...]`` copies the tree,
applies one edit, runs the named tests, reports; ``on_*.py`` list them, ``catalogue.py`` has them all.
"""
