-- Load jobs: one row per model that is being loaded. The primary key is the lock, and the row is the truth.
--
-- Every write carries owner and attempt. Zero rows changed = somebody took the job over, or it was cancelled: stop, touch
-- nothing more. What an orphaned job is says the function load_job_orphaned.

-- name: claim
-- Starts a load of a model, or takes over one that is orphaned, or starts again after a failure; no row = somebody
-- else is at it, or this frontend has said that it can't. A take-over keeps the node, so that the bytes there are
-- resumed; a fresh start after a failure keeps that failure's text, so that waiters of the failed attempt that look late
-- still learn why it failed.
-- acts: not_live
insert into model_load_jobs as j (tracking_key, attempt, state, owner_replica, config_revision, model_config)
values (%(key)s, nextval('model_load_attempts'), 'pending', %(owner)s, %(revision)s, %(config)s)
on conflict (tracking_key) do update
set attempt = excluded.attempt, state = 'pending', owner_replica = excluded.owner_replica,
    config_revision = excluded.config_revision, model_config = excluded.model_config,
    node_id = case when j.state = 'failed' then '' else j.node_id end,
    node_name = case when j.state = 'failed' then '' else j.node_name end,
    replica_index = case when j.state = 'failed' then 0 else j.replica_index end,
    bytes_sent = case when j.state = 'failed' then 0 else j.bytes_sent end,
    total_bytes = case when j.state = 'failed' then 0 else j.total_bytes end,
    file_index = 0, file_name = '', phase = 'waiting', rate = null,
    lacking = case when j.state = 'failed' then '{}' else j.lacking end,
    offered_at = case when j.state = 'failed' then null else j.offered_at end,
    cancelled_at = null, cancel_reason = '', waits = '',
    last_error = case when j.state = 'failed' then j.last_error else '' end,
    started_at = null, updated_at = now(), last_progress = now(),
    created_at = case when j.state = 'failed' then now() else j.created_at end
where j.state = 'failed'
   or (j.cancelled_at is null and not jsonb_exists(j.lacking, %(owner)s)
       and load_job_orphaned(j, %(owner)s, %(orphan_after)s, %(silence)s, %(live_window)s))
returning attempt, node_id, bytes_sent;

-- name: claim_lacking
-- Takes an orphaned job although something is lacking here, because no frontend has every file; fenced by the attempt
-- that was looked at, so only one of them does.
-- acts: not_live
update model_load_jobs j
set attempt = nextval('model_load_attempts'), state = 'pending', owner_replica = %(owner)s,
    config_revision = %(revision)s, model_config = %(config)s, file_index = 0, file_name = '', phase = 'waiting',
    rate = null, waits = '', last_error = '', started_at = null, updated_at = now(), last_progress = now()
where j.tracking_key = %(key)s and j.attempt = %(attempt)s and j.cancelled_at is null
  and load_job_orphaned(j, %(owner)s, %(orphan_after)s, %(silence)s, %(live_window)s)
returning attempt, node_id, bytes_sent;

-- name: claim_cancelled
-- Takes over a cancelled job whose owner is gone, to clear away what it left.
-- acts: not_live
update model_load_jobs j
set attempt = nextval('model_load_attempts'), owner_replica = %(owner)s, last_progress = now()
where j.tracking_key = %(key)s and j.cancelled_at is not null
  and load_job_orphaned(j, %(owner)s, %(orphan_after)s, %(silence)s, %(live_window)s)
returning attempt, node_id, bytes_sent, replica_index;

-- name: advance
-- Moves a job to its next state and says on which node; also the fence before each thing the job does to a worker.
-- acts: none
update model_load_jobs
set state = %(state)s, node_id = %(node)s, node_name = %(node_name)s, replica_index = %(replica_index)s,
    updated_at = now(), last_progress = now()
where tracking_key = %(key)s and owner_replica = %(owner)s and attempt = %(attempt)s and state <> 'failed'
  and cancelled_at is null;

-- name: beat
-- The heartbeat: driven by time, because a backend that reads its model moves no bytes for minutes. It never touches the
-- cancel mark, and tells it.
-- acts: none
update model_load_jobs
set bytes_sent = %(bytes_sent)s, total_bytes = %(total_bytes)s, file_index = %(file_index)s,
    total_files = %(total_files)s, file_name = %(file_name)s, phase = %(phase)s, rate = %(rate)s, waits = %(waits)s,
    last_progress = now(), started_at = coalesce(started_at, case when %(moved)s > 0 then now() end)
where tracking_key = %(key)s and owner_replica = %(owner)s and attempt = %(attempt)s and state <> 'failed'
returning cancelled_at is not null as cancelled, cancel_reason;

-- name: fail
-- Ends a job with its cause; the row stays for a few seconds, for the waiters on other frontends.
-- acts: none
update model_load_jobs
set state = 'failed', last_error = %(error)s, updated_at = now(), last_progress = now()
where tracking_key = %(key)s and owner_replica = %(owner)s and attempt = %(attempt)s and state <> 'failed'
  and cancelled_at is null;

-- name: finish
-- Ends a job with success: its row goes and the replica's row comes, in one step, only while the attempt is ours.
-- acts: fenced
with done as (
    delete from model_load_jobs
    where tracking_key = %(key)s and owner_replica = %(owner)s and attempt = %(attempt)s and state <> 'failed'
      and cancelled_at is null
    returning tracking_key, attempt
), ended as (
    insert into model_load_endings (model_name, attempt, outcome, node_id, config_revision, total_bytes, moved, rate,
                                    load_seconds)
    select tracking_key, attempt, 'loaded', %(node)s, %(revision)s, %(total_bytes)s, %(moved)s, %(rate)s,
           %(load_seconds)s
    from done
)
insert into node_models as m (node_id, model_name, replica_index, address, backend_token, backend_type, state,
                              config_revision)
select %(node)s, %(key)s, %(replica_index)s, %(address)s, %(backend_token)s, %(backend_type)s, 'loaded', %(revision)s
from done
on conflict (node_id, model_name, replica_index) do update
set address = excluded.address, backend_token = excluded.backend_token, backend_type = excluded.backend_type,
    state = 'loaded', config_revision = excluded.config_revision, last_used = now(), updated_at = now(),
    cleanup_error = '', cleanup_attempts = 0, cleanup_next_retry_at = null, unserved = '{}',
    in_flight = case when m.address = excluded.address then m.in_flight else 0 end,
    callers = case when m.address = excluded.address then m.callers else '{}' end
returning node_id;

-- name: offer
-- Gives a job to the frontends that have its files: this one says what it lacks, and claims it again only as the last
-- resort ("claim_lacking").
-- acts: none
update model_load_jobs
set owner_replica = '', state = 'pending', phase = 'waiting', waits = '',
    lacking = lacking || jsonb_build_object(%(owner)s::text, %(lack)s::jsonb), offered_at = coalesce(offered_at, now()),
    updated_at = now(), last_progress = now() - make_interval(secs => %(orphan_after)s + 1)
where tracking_key = %(key)s and owner_replica = %(owner)s and attempt = %(attempt)s and state <> 'failed'
  and cancelled_at is null;

-- name: refuse
-- Ends a job that nobody runs and nobody can run; fenced by the attempt of the last frontend that tried.
-- acts: none
update model_load_jobs j
set state = 'failed', owner_replica = '', last_error = %(error)s, updated_at = now(), last_progress = now()
where tracking_key = %(key)s and attempt = %(attempt)s and cancelled_at is null
  and load_job_orphaned(j, %(owner)s, %(orphan_after)s, %(silence)s, %(live_window)s);

-- name: abandon
-- Gives a job up on purpose (this frontend stops): whoever looks next takes it over at once.
-- acts: none
update model_load_jobs
set owner_replica = '', waits = '', updated_at = now(), last_progress = now() - make_interval(secs => %(orphan_after)s + 1)
where tracking_key = %(key)s and owner_replica = %(owner)s and attempt = %(attempt)s and state <> 'failed';

-- name: cancel
-- Marks a running job as cancelled, once and for good; whoever runs it stops.
-- acts: none
update model_load_jobs
set cancel_reason = case when cancelled_at is null then %(reason)s else cancel_reason end,
    cancelled_at = coalesce(cancelled_at, now())
where tracking_key = %(key)s and state <> 'failed'
returning attempt;

-- name: close_cancelled
-- Ends a cancelled job after everything was cleared away: its row goes, its ending stays for the waiters elsewhere.
-- acts: asked
with done as (
    delete from model_load_jobs
    where tracking_key = %(key)s and owner_replica = %(owner)s and attempt = %(attempt)s and cancelled_at is not null
    returning *
)
insert into model_load_endings (model_name, attempt, outcome, reason, node_id, config_revision)
select tracking_key, attempt, 'cancelled', cancel_reason, node_id, config_revision from done;

-- name: read
-- One job; "live" are the live frontends.
select j.*, load_job_orphaned(j, %(owner)s, %(orphan_after)s, %(silence)s, %(live_window)s) as orphaned,
       coalesce(extract(epoch from now() - j.offered_at), 0)::double precision as offered_for,
       extract(epoch from now() - j.updated_at)::double precision as in_state_for,
       coalesce(extract(epoch from now() - j.cancelled_at), 0)::double precision as cancelled_for,
       array(select i.id::text from instances i
             where i.last_seen > now() - make_interval(secs => %(live_window)s)) as live
from model_load_jobs j where j.tracking_key = %(key)s;

-- name: all
-- Every job, the oldest first; columns as in "read".
select j.*, load_job_orphaned(j, %(owner)s, %(orphan_after)s, %(silence)s, %(live_window)s) as orphaned,
       coalesce(extract(epoch from now() - j.offered_at), 0)::double precision as offered_for,
       extract(epoch from now() - j.updated_at)::double precision as in_state_for,
       coalesce(extract(epoch from now() - j.cancelled_at), 0)::double precision as cancelled_for,
       array(select i.id::text from instances i
             where i.last_seen > now() - make_interval(secs => %(live_window)s)) as live
from model_load_jobs j order by j.created_at, j.tracking_key;

-- name: sweep
-- Removes failures that everybody has had time to see, and orphans that no frontend could take over (none of them
-- knows the model any more).
-- acts: expired
delete from model_load_jobs j
where (j.state = 'failed' and j.updated_at < now() - make_interval(secs => %(failed_kept)s))
   or (j.state <> 'failed' and j.last_progress < now() - make_interval(secs => %(orphan_after)s + %(unclaimed_kept)s));

-- name: drop
-- Gives a claim back before anything was done with it: the model turned out to be loaded.
-- acts: fenced
delete from model_load_jobs where tracking_key = %(key)s and owner_replica = %(owner)s and attempt = %(attempt)s;
