"""
Measurements: ``python -m bench [NAME ...]``, or ``make bench`` for all.

Reading order: ``rows.py`` (what a measurement says, and where it is written), ``__main__.py`` (which there are), then
one module for each. A number is never an assertion of the test suite; the promised bounds are asserted there.
"""
