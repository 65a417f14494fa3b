-- Which frontends no longer serve the model of a replica, so that one whose model was deleted everywhere is stopped.

alter table node_models
    add column unserved jsonb not null default '{}';   -- instance id -> when it said so last (seconds since 1970)
