-- Load jobs: one row per model that is being loaded. The primary key is the lock, and the row is the truth.
--
-- Every write carries owner and attempt. Zero rows changed = somebody took the job over: stop, touch nothing.
-- A job is orphaned when its owner is not live, or when it was silent for the orphan time. An owner that is in no
-- instances row (a frontend without a usable address) still beats, so a few missed beats are asked for as well. A job
-- under one's own name that does not beat is what an earlier process of that name left behind.

-- name: claim
-- Starts a load of a model, or takes over one that is orphaned, or starts again after a failure; no row = somebody
-- else is at it. A take-over keeps the node, so that the bytes there are resumed; a fresh start after a failure keeps
-- that failure's text, so that waiters of the failed attempt that look late still learn why it failed.
-- acts: not_live
insert into model_load_jobs as j (tracking_key, attempt, state, owner_replica)
values (%(key)s, nextval('model_load_attempts'), 'pending', %(owner)s)
on conflict (tracking_key) do update
set attempt = excluded.attempt, state = 'pending', owner_replica = excluded.owner_replica,
    node_id = case when j.state = 'failed' then '' else j.node_id end,
    node_name = case when j.state = 'failed' then '' else j.node_name end,
    replica_index = case when j.state = 'failed' then 0 else j.replica_index end,
    bytes_sent = case when j.state = 'failed' then 0 else j.bytes_sent end,
    total_bytes = case when j.state = 'failed' then 0 else j.total_bytes end,
    file_index = 0,
    last_error = case when j.state = 'failed' then j.last_error else '' end,
    started_at = null, updated_at = now(), last_progress = now(),
    created_at = case when j.state = 'failed' then now() else j.created_at end
where j.state = 'failed'
   or j.last_progress < now() - make_interval(secs => %(orphan_after)s)
   or (j.last_progress < now() - make_interval(secs => %(silence)s)
       and (j.owner_replica = %(owner)s
            or not exists (select 1 from instances i where i.id = j.owner_replica
                           and i.last_seen > now() - make_interval(secs => %(live_window)s))))
returning attempt, node_id;

-- name: advance
-- Moves a job to its next state and says on which node; also the fence before each thing the job does to a worker.
-- acts: none
update model_load_jobs
set state = %(state)s, node_id = %(node)s, node_name = %(node_name)s, replica_index = %(replica_index)s,
    updated_at = now(), last_progress = now()
where tracking_key = %(key)s and owner_replica = %(owner)s and attempt = %(attempt)s and state <> 'failed';

-- name: beat
-- The heartbeat: driven by time, because a backend that reads its model moves no bytes for minutes.
-- acts: none
update model_load_jobs
set bytes_sent = %(bytes_sent)s, total_bytes = %(total_bytes)s, file_index = %(file_index)s,
    total_files = %(total_files)s, last_progress = now(),
    started_at = coalesce(started_at, case when %(moved)s > 0 then now() end)
where tracking_key = %(key)s and owner_replica = %(owner)s and attempt = %(attempt)s and state <> 'failed';

-- name: fail
-- Ends a job with its cause; the row stays for a few seconds, for the waiters on other frontends.
-- acts: none
update model_load_jobs
set state = 'failed', last_error = %(error)s, updated_at = now(), last_progress = now()
where tracking_key = %(key)s and owner_replica = %(owner)s and attempt = %(attempt)s and state <> 'failed';

-- name: finish
-- Ends a job with success: its row goes and the replica's row comes, in one step, only while the attempt is ours.
-- acts: fenced
with done as (
    delete from model_load_jobs
    where tracking_key = %(key)s and owner_replica = %(owner)s and attempt = %(attempt)s and state <> 'failed'
    returning tracking_key
)
insert into node_models as m (node_id, model_name, replica_index, address, backend_token, backend_type, state,
                              config_revision)
select %(node)s, %(key)s, %(replica_index)s, %(address)s, %(backend_token)s, %(backend_type)s, 'loaded', %(revision)s
from done
on conflict (node_id, model_name, replica_index) do update
set address = excluded.address, backend_token = excluded.backend_token, backend_type = excluded.backend_type,
    state = 'loaded', config_revision = excluded.config_revision, last_used = now(), updated_at = now(),
    in_flight = case when m.address = excluded.address then m.in_flight else 0 end
returning node_id;

-- name: abandon
-- Gives a job up on purpose (this frontend stops): whoever looks next takes it over at once.
-- acts: none
update model_load_jobs
set owner_replica = '', updated_at = now(), last_progress = now() - make_interval(secs => %(orphan_after)s + 1)
where tracking_key = %(key)s and owner_replica = %(owner)s and attempt = %(attempt)s and state <> 'failed';

-- name: read
-- One job.
select j.*, (j.state <> 'failed' and (
           j.last_progress < now() - make_interval(secs => %(orphan_after)s)
        or (j.last_progress < now() - make_interval(secs => %(silence)s)
            and (j.owner_replica = %(owner)s
                 or not exists (select 1 from instances i where i.id = j.owner_replica
                                and i.last_seen > now() - make_interval(secs => %(live_window)s)))))) as orphaned
from model_load_jobs j where j.tracking_key = %(key)s;

-- name: all
-- Every job, the oldest first.
select j.*, (j.state <> 'failed' and (
           j.last_progress < now() - make_interval(secs => %(orphan_after)s)
        or (j.last_progress < now() - make_interval(secs => %(silence)s)
            and (j.owner_replica = %(owner)s
                 or not exists (select 1 from instances i where i.id = j.owner_replica
                                and i.last_seen > now() - make_interval(secs => %(live_window)s)))))) as orphaned
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
