-- Load jobs: what they are doing right now, what they load, who can't run them, whether they were cancelled; and how
-- finished loads went.

alter table model_load_jobs
    add column phase           varchar(16) not null default '',   -- waiting, hashing, sending, verifying, loading
    add column file_name       text not null default '',
    add column rate            double precision,                   -- bytes/s of the last seconds; null = not measured
    add column config_revision varchar(64) not null default '',
    add column model_config    text not null default '',           -- the model's configuration, JSON
    add column lacking         jsonb not null default '{}',        -- instance id -> what it lacks to run this job
    add column offered_at      timestamptz,                        -- since when it looks for a frontend that has the files
    add column cancelled_at    timestamptz,                        -- whoever runs it stops
    add column cancel_reason   text not null default '';

-- How loads ended: what estimates, what a node has on its disk already, and waiters of a cancelled load rest on.
create table model_load_endings (
    id              bigserial primary key,
    model_name      varchar(255) not null,
    attempt         bigint not null,
    outcome         varchar(16) not null check (outcome in ('loaded', 'cancelled')),
    reason          text not null default '',
    node_id         varchar(36) not null default '',
    config_revision varchar(64) not null default '',
    total_bytes     bigint not null default 0,
    moved           bigint not null default 0,                     -- bytes that had to be sent
    rate            double precision,                              -- bytes/s while they were; null = not measured
    load_seconds    double precision,                              -- of the backend's LoadModel
    ended_at        timestamptz not null default now()
);
create index model_load_endings_model on model_load_endings (model_name, id);
create index model_load_endings_node on model_load_endings (node_id, id);
create index model_load_endings_ended on model_load_endings (ended_at);

-- Whether nobody runs a job any more: its owner is not live, or it was silent for the orphan time. An owner that is in
-- no instances row (a frontend without a usable address) still beats, so a few missed beats are asked for as well. A job
-- under one's own name that does not beat is what an earlier process of that name left behind.
create function load_job_orphaned(job model_load_jobs, asker text, orphan_after double precision,
                                  silence double precision, live_window double precision) returns boolean
language sql stable as $$
    select job.state <> 'failed' and (
           job.last_progress < now() - make_interval(secs => orphan_after)
        or (job.last_progress < now() - make_interval(secs => silence)
            and (job.owner_replica = asker
                 or not exists (select 1 from instances i where i.id = job.owner_replica
                                and i.last_seen > now() - make_interval(secs => live_window)))))
$$;
