"""
Where models go. Pure.

Reading order: ``facts.py`` (what is looked at), ``placement.py`` (what is decided)::

    nodes, replicas, tunnels ─▶ warm()   ─▶ a loaded replica, or none
                             └▶ choose() ─▶ Placement, or NoPlace with its reason and condition
"""
