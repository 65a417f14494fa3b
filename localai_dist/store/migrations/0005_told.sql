-- What operators are told: what keeps a load from going on, and where a node and a newcomer under its name registered from.

alter table model_load_jobs
    add column waits text not null default '';                 -- encoded as last_error is; '' while it goes on

alter table backend_nodes
    add column registered_from varchar(255) not null default '',  -- as the frontend saw it; '' = not known
    add column parked_from     varchar(255) not null default '';

create or replace view node_facts as
select n.id, n.name, n.node_type, n.status, n.approved_at is not null as approved,
       n.parked_token_hash <> '' as newcomer_waiting, n.boot_id, n.left_at, n.address, n.http_address,
       n.total_vram, n.available_vram, n.reserved_vram, n.total_ram, n.available_ram, n.total_disk, n.available_disk,
       n.gpu_vendor, n.gpu_compute_capability, n.capability,
       n.max_replicas_per_model, n.max_replicas_per_model_manually_set,
       n.vram_budget, n.vram_budget_bytes, n.vram_budget_manually_set,
       n.last_heartbeat, n.created_at, n.updated_at,
       coalesce((select jsonb_object_agg(l.key, l.value) from node_labels l where l.node_id = n.id), '{}') as labels,
       (select count(*) from node_models m where m.node_id = n.id and m.state = 'loaded') as model_count,
       (select coalesce(sum(m.in_flight), 0)::bigint from node_models m where m.node_id = n.id) as in_flight_count,
       n.registered_from,
       case when n.parked_token_hash <> '' then n.parked_from else '' end as newcomer_from,
       case when n.parked_token_hash <> '' then n.parked_at end as newcomer_since
from backend_nodes n;
