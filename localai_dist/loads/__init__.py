"""
Cold loads: a model that is asked for and not loaded gets loaded once, however many ask, wherever.

Reading order (the first five are pure)::

    budget.py     how long each part may take;  status.py  what can be said about a load
    errors.py     what a caller may be told;    cause.py   the cause of a failure, in and out of the row
    options.py    configuration -> LoadModel
    table.py      the job rows (statements in store/sql/load_jobs.sql)
    fleet.py      registry rows -> placement facts;  tools.py  the seams
    stop.py       ending exactly one process
    steps.py      the work on one node;  job.py  one attempt: hold, heartbeat, fence
    flight.py     the waiters of one model;  sightings.py  measured estimates
    unload.py     taking replicas off
    service.py    Loads: ensure, status, jobs, unload, the sweep

    ensure ─▶ warm replica? ─yes─▶ it
                 │ no
              Flight (one per model and frontend) ─▶ claim the row
                 ├─ ours:   LoadJob: place ─▶ install ─▶ stage ─▶ LoadModel ─▶ job row out, replica row in
                 └─ theirs: look at the row twice a second ─▶ gone: warm · failed: the cause · orphaned: claim it
"""
