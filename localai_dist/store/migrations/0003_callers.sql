-- Whose the requests in flight are, so that those of a frontend that died without a word can be taken off again.

alter table node_models
    add column callers jsonb not null default '{}';   -- instance id -> how many of in_flight are its
