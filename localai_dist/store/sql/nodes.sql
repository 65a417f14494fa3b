-- Nodes: registration, identity, approval, heartbeat, status, labels.

-- name: all
-- Every node, by name.
select * from node_facts order by name;

-- name: get
-- One node by id.
select * from node_facts where id = %(id)s;

-- name: by_name
-- One node by name.
select * from node_facts where name = %(name)s;

-- name: identity
-- The stored identity of a name, locked until the registration is decided.
select id, approved_at is not null as approved, node_token_hash, parked_token_hash, boot_id,
       max_replicas_per_model_manually_set, vram_budget, vram_budget_manually_set
from backend_nodes where name = %(name)s for update;

-- name: create
-- A node nobody knew; nothing if somebody created the name meanwhile.
insert into backend_nodes (name, node_type, status, approved_at, token_hash, node_token_hash, boot_id,
    total_vram, available_vram, total_ram, available_ram, total_disk, available_disk,
    gpu_vendor, gpu_compute_capability, capability, max_replicas_per_model, vram_budget, vram_budget_bytes,
    registered_from, last_heartbeat)
values (%(name)s, %(node_type)s, case when %(approve)s then 'healthy' else 'pending' end,
    case when %(approve)s then now() end, %(token_hash)s, %(node_token_hash)s, %(boot_id)s,
    %(total_vram)s, %(available_vram)s, %(total_ram)s, %(available_ram)s, %(total_disk)s, %(available_disk)s,
    %(gpu_vendor)s, %(gpu_compute_capability)s, %(capability)s, %(max_replicas_per_model)s, %(vram_budget)s,
    %(vram_budget_bytes)s, %(seen_from)s, now())
on conflict (name) do nothing
returning id;

-- name: refresh
-- A known node registered again under its own identity. What an admin set by hand stays; a pending node stays pending
-- unless nodes are approved by themselves; a node being drained goes on draining unless it restarted.
-- acts: none
update backend_nodes set
    node_type = %(node_type)s,
    approved_at = case when %(approve)s then coalesce(approved_at, now()) else approved_at end,
    status = case when approved_at is null and not %(approve)s then 'pending'
                  when status = 'draining' and not %(restarted)s then 'draining'
                  else 'healthy' end,
    token_hash = %(token_hash)s, node_token_hash = %(node_token_hash)s, boot_id = %(boot_id)s, left_at = null,
    total_vram = %(total_vram)s, available_vram = %(available_vram)s,
    reserved_vram = case when %(restarted)s then 0 else reserved_vram end,
    total_ram = %(total_ram)s, available_ram = %(available_ram)s,
    total_disk = %(total_disk)s, available_disk = %(available_disk)s,
    gpu_vendor = %(gpu_vendor)s, gpu_compute_capability = %(gpu_compute_capability)s, capability = %(capability)s,
    max_replicas_per_model = case when max_replicas_per_model_manually_set then max_replicas_per_model
                                  else %(max_replicas_per_model)s end,
    vram_budget = %(vram_budget)s, vram_budget_bytes = %(vram_budget_bytes)s, registered_from = %(seen_from)s,
    last_heartbeat = now(), updated_at = now()
where id = %(id)s;

-- name: park
-- A newcomer under a known name: its token's hash waits beside the node; nothing else changes.
-- acts: none
update backend_nodes
set parked_token_hash = %(parked_token_hash)s, parked_at = now(), parked_from = %(parked_from)s
where id = %(id)s;

-- name: drop_replicas
-- The worker restarted, left, or was replaced: what it had loaded is gone with it.
-- acts: worker_gone
delete from node_models where node_id = %(id)s;

-- name: tokens
-- What a presented node token is compared with.
select name, approved_at is not null as approved, node_token_hash, parked_token_hash from backend_nodes where id = %(id)s;

-- name: still_theirs
-- Of nodes with open tunnels, each with the digest of the token its tunnel came with: those whose tunnel may stay.
select n.id from unnest(%(nodes)s::varchar[], %(digests)s::varchar[]) as held (id, digest)
join backend_nodes n on n.id = held.id
where n.approved_at is not null and (%(loose)s or n.node_token_hash = held.digest);

-- name: approve
-- A pending node is approved; else a waiting newcomer takes the identity over. Nothing when neither waits. The row tells
-- whom it replaced.
-- The newcomer registered, so it runs: what the row says of the worker before it (left, silent) ends with the hand-over.
-- acts: none
with before as (
    select id, approved_at is not null as replaced, status, registered_from, last_heartbeat
    from backend_nodes where id = %(id)s for update
)
update backend_nodes n set
    status = case when n.approved_at is null or n.status = 'offline' then 'healthy' else n.status end,
    left_at = case when n.approved_at is null then n.left_at end,
    last_heartbeat = case when n.approved_at is null then n.last_heartbeat else now() end,
    node_token_hash = case when n.approved_at is null then n.node_token_hash else n.parked_token_hash end,
    registered_from = case when n.approved_at is null then n.registered_from else n.parked_from end,
    parked_token_hash = case when n.approved_at is null then n.parked_token_hash else '' end,
    parked_from = case when n.approved_at is null then n.parked_from else '' end,
    parked_at = case when n.approved_at is null then n.parked_at end,
    approved_at = now(), updated_at = now()
from before
where n.id = before.id and (n.approved_at is null or n.parked_token_hash <> '')
returning before.replaced, before.status, before.registered_from, before.last_heartbeat;

-- name: heartbeat
-- A sign of life. Only stale-heartbeat `offline` of an approved node that did not leave ends by it: never `pending`,
-- never `unhealthy` (its route may be gone), never `draining`. Readings that are absent keep their value.
-- acts: none
update backend_nodes set
    last_heartbeat = now(),
    status = case when status = 'offline' and approved_at is not null and left_at is null then 'healthy'
                  else status end,
    available_vram = case when %(available_vram)s::bigint is null then available_vram
                          when vram_budget_bytes > 0 then least(%(available_vram)s::bigint, vram_budget_bytes)
                          else %(available_vram)s::bigint end,
    reserved_vram = case when %(available_vram)s::bigint is null then reserved_vram else 0 end,
    total_vram = coalesce(%(total_vram)s::bigint, total_vram),
    available_ram = coalesce(%(available_ram)s::bigint, available_ram),
    total_disk = coalesce(%(total_disk)s::bigint, total_disk),
    available_disk = coalesce(%(available_disk)s::bigint, available_disk),
    gpu_vendor = coalesce(%(gpu_vendor)s::varchar, gpu_vendor)
where id = %(id)s
returning exists (select 1 from node_connections c
                  where c.node_id = backend_nodes.id and c.owner_instance_id <> '') as tunnel_held;

-- name: drain
-- No new work for an approved node; what it has loaded stays and finishes.
-- acts: asked
update backend_nodes set status = 'draining', updated_at = now()
where id = %(id)s and approved_at is not null and status <> 'pending'
returning id;

-- name: resume
-- A drained node takes work again; one whose worker said good-bye meanwhile stays offline until that is back.
-- acts: none
update backend_nodes set status = case when left_at is null then 'healthy' else 'offline' end, updated_at = now()
where id = %(id)s and approved_at is not null and status = 'draining'
returning id;

-- name: leave
-- The worker said good-bye: offline on purpose, no heartbeat brings it back; a pending node stays pending.
-- acts: worker_gone
update backend_nodes set status = case when approved_at is null then 'pending' else 'offline' end,
    left_at = now(), reserved_vram = 0, updated_at = now()
where id = %(id)s
returning id;

-- name: remove
-- An admin removed the node: row, labels, replicas and connection.
-- acts: asked
with connection as (delete from node_connections where node_id = %(id)s)
delete from backend_nodes where id = %(id)s returning id;

-- name: mark_stale_offline
-- Approved nodes that were silent too long, draining ones aside.
-- acts: stale_heartbeat
update backend_nodes set status = 'offline', updated_at = now()
where approved_at is not null and status in ('healthy', 'unhealthy')
  and coalesce(last_heartbeat, created_at) < now() - make_interval(secs => %(stale_after)s)
returning id;

-- name: mark_unhealthy
-- The node's route departed: no new work until it is back. It may be back since that was read: a tunnel that somebody
-- holds now has not departed.
-- acts: may_demote
update backend_nodes set status = 'unhealthy', updated_at = now()
where id = %(id)s and approved_at is not null and status = 'healthy'
  and not exists (select from node_connections c where c.node_id = backend_nodes.id and c.owner_instance_id <> '')
returning id;

-- name: mark_healthy
-- An unhealthy node that beats and has its route again.
-- acts: none
update backend_nodes set status = 'healthy', updated_at = now()
where id = %(id)s and approved_at is not null and left_at is null and status in ('unhealthy', 'offline')
  and last_heartbeat > now() - make_interval(secs => %(fresh_within)s)
returning id;

-- name: labels
-- The labels of a node.
select key, value from node_labels where node_id = %(id)s order by key;

-- name: merge_labels
-- Set these labels, keep the others.
-- acts: none
insert into node_labels (node_id, key, value)
select %(id)s, key, value from jsonb_each_text(%(labels)s::jsonb)
on conflict (node_id, key) do update set value = excluded.value;

-- name: clear_labels
-- Drop every label of a node.
-- acts: asked
delete from node_labels where node_id = %(id)s;

-- name: delete_label
-- Drop one label.
-- acts: asked
delete from node_labels where node_id = %(id)s and key = %(key)s;
