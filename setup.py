"""The package list; everything else is in setup.cfg."""

from setuptools import find_packages, setup

# ``twisted.plugins`` is named because no ``__init__.py`` stands under twisted/, so find_packages would skip it.
setup(packages=[*find_packages(include=["localai_dist", "localai_dist.*"]), "twisted.plugins"])
