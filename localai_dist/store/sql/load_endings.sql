-- How loads ended. Written by load_jobs.sql in the step that ends the job.

-- name: cancelled
-- Why an attempt was cancelled; no row = it was not.
select reason from model_load_endings
where model_name = %(key)s and attempt = %(attempt)s and outcome = 'cancelled';

-- name: staged
-- Bytes of a model that nodes have on their disks, as far as the last load there tells.
select distinct on (node_id) node_id, case outcome when 'loaded' then total_bytes else 0 end as bytes
from model_load_endings where model_name = %(key)s and node_id <> ''
order by node_id, id desc;

-- name: recent
-- The last measured loads on a node, the newest first.
select total_bytes, rate, load_seconds from model_load_endings
where node_id = %(node)s and outcome = 'loaded' and rate > 0 and load_seconds is not null and total_bytes > 0
order by id desc limit %(most)s;

-- name: forget
-- Endings that nothing rests on any more: old ones, except the newest of each model and node.
-- acts: expired
delete from model_load_endings e
where e.ended_at < now() - make_interval(secs => %(kept)s)
  and exists (select 1 from model_load_endings n
              where n.model_name = e.model_name and n.node_id = e.node_id and n.id > e.id);
