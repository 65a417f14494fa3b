-- Replicas of older configurations and of models that were deleted: no new request, then stopped one by one, with the
-- next try kept in the row.

-- name: mark
-- A loaded replica of an older configuration takes no new request from now on; the cleanup may begin.
-- acts: asked
update node_models
set state = 'unloading', cleanup_next_retry_at = now(), cleanup_attempts = 0, cleanup_error = '', updated_at = now()
where node_id = %(node)s and model_name = %(model)s and replica_index = %(index)s and address = %(address)s
  and config_revision = %(revision)s and state = 'loaded';

-- name: vote
-- A frontend says that it serves the model of a replica no more.
-- acts: none
update node_models
set unserved = unserved || jsonb_build_object(%(owner)s::text, extract(epoch from now()))
where node_id = %(node)s and model_name = %(model)s and replica_index = %(index)s and address = %(address)s
  and state = 'loaded';

-- name: mark_unserved
-- A loaded replica whose model no frontend serves any more: every live one has said so a moment ago,
-- and the one that asks is live itself: after a time without the database nobody is at first.
-- acts: asked
update node_models m
set state = 'unloading', cleanup_next_retry_at = now(), cleanup_attempts = 0, cleanup_error = '', updated_at = now()
where node_id = %(node)s and model_name = %(model)s and replica_index = %(index)s and address = %(address)s
  and config_revision = %(revision)s and state = 'loaded'
  and exists (
      select from instances i
      where i.id = %(owner)s and i.last_seen > now() - make_interval(secs => %(live_window)s))
  and not exists (
      select from instances i
      where i.last_seen > now() - make_interval(secs => %(live_window)s)
        and coalesce((m.unserved ->> i.id)::double precision, 0) < extract(epoch from now()) - %(fresh)s);

-- name: take
-- One replica to stop now, for one frontend: idle, or drained for long enough. Its next try is set before this one
-- begins, so that a frontend that dies at it leaves it to the others. One without a next try was to make room for a load
-- that ended before it could.
-- acts: none
update node_models m
set cleanup_next_retry_at = now() + make_interval(secs => %(lease)s), cleanup_attempts = m.cleanup_attempts + 1
from (select id from node_models
      where state = 'unloading' and coalesce(cleanup_next_retry_at, updated_at + interval '2 minutes') <= now()
        and (in_flight = 0 or updated_at < now() - make_interval(secs => %(drain)s))
      order by cleanup_next_retry_at limit 1 for update skip locked) one
where m.id = one.id
returning m.*;

-- name: failed
-- It did not go; why, and when to try again.
-- acts: none
update node_models
set cleanup_error = %(error)s, cleanup_next_retry_at = now() + make_interval(secs => %(again)s)
where node_id = %(node)s and model_name = %(model)s and replica_index = %(index)s and address = %(address)s
  and state = 'unloading';
