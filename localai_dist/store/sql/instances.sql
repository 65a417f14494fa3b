-- Running frontends. Alive means: seen by the database's clock within the live window.

-- name: register
-- Publish a frontend: address and secret's hash in one statement.
-- acts: none
insert into instances (id, advertised_addr, version, peer_token_hash, last_seen)
values (%(id)s, %(address)s, %(version)s, %(peer_token_hash)s, now())
on conflict (id) do update set
    advertised_addr = excluded.advertised_addr, version = excluded.version,
    peer_token_hash = excluded.peer_token_hash, last_seen = now();

-- name: arrive
-- The same for a process that has just started: whatever the rows say this id holds, its former process held. Those
-- tunnels are lost from now on, or a worker that was away at the same time would read connected for ever; those requests
-- run no more.
-- acts: not_live
with former as (
    update node_connections set owner_instance_id = '', disconnected_at = now()
    where owner_instance_id = %(id)s returning node_id
), cut as (
    update node_models m
    set in_flight = greatest(m.in_flight - coalesce((m.callers ->> %(id)s::text)::int, 0), 0),
        callers = m.callers - %(id)s::text
    where m.id in (select id from node_models where jsonb_exists(callers, %(id)s) order by id for update)
), published as (
    insert into instances (id, advertised_addr, version, peer_token_hash, last_seen)
    values (%(id)s, %(address)s, %(version)s, %(peer_token_hash)s, now())
    on conflict (id) do update set
        advertised_addr = excluded.advertised_addr, version = excluded.version,
        peer_token_hash = excluded.peer_token_hash, last_seen = now()
    returning id
)
select former.node_id from published left join former on true where former.node_id is not null;

-- name: heartbeat
-- Still here; changes nothing when the row was swept.
-- acts: none
update instances set last_seen = now() where id = %(id)s;

-- name: beat
-- Everything one frontend does every few seconds, in one statement: its own heartbeat; dead frontends swept; tunnels of
-- frontends that are gone marked as lost (only the very claim that was seen, so a fresh one is never stamped out); old
-- departures purged, unless the node still has replica rows: those may only go on the fact that it departed, so the fact
-- stays as long as they do. Requests of frontends that are gone are taken off the replicas they were counted on (a
-- frontend swept here: at the next beat). Locks are only tried for, so two frontends never wait for each other.
-- acts: not_live
with own as (
    update instances set last_seen = now() where id = %(id)s returning id
), dead as (
    select id from instances
    where id <> %(id)s and last_seen <= now() - make_interval(secs => %(window)s)
    for update skip locked
), swept as (
    delete from instances i using dead where i.id = dead.id returning i.id
), orphans as (
    select c.node_id, c.epoch from node_connections c
    where c.owner_instance_id <> '' and c.owner_instance_id <> %(id)s
      and (c.owner_instance_id in (select id from swept)
           or not exists (select from instances i where i.id = c.owner_instance_id))
    for update of c skip locked
), lost as (
    update node_connections c set owner_instance_id = '', disconnected_at = now()
    from orphans o where c.node_id = o.node_id and c.epoch = o.epoch returning c.node_id
), old as (
    select c.node_id, c.epoch from node_connections c
    where c.owner_instance_id = '' and c.disconnected_at < now() - make_interval(secs => %(retention)s)
      and not exists (select from node_models m where m.node_id = c.node_id)
    for update skip locked
), purged as (
    delete from node_connections c using old where c.node_id = old.node_id and c.epoch = old.epoch
    returning c.node_id
), overcounted as (
    select m.id from node_models m
    where exists (select from jsonb_object_keys(m.callers) c
                  where not exists (select from instances i where i.id = c))
    for update of m skip locked
), corrected as (
    update node_models m
    set in_flight = greatest(m.in_flight - (
            select coalesce(sum(c.value::int), 0) from jsonb_each_text(m.callers) c
            where not exists (select from instances i where i.id = c.key)), 0),
        callers = (
            select coalesce(jsonb_object_agg(c.key, c.value), '{}') from jsonb_each(m.callers) c
            where exists (select from instances i where i.id = c.key))
    from overcounted o where m.id = o.id
)
select exists (select from own) as alive,
       (select coalesce(array_agg(id), '{}') from swept) as swept,
       (select coalesce(array_agg(node_id), '{}') from lost) as lost,
       (select count(*) from purged) as purged;

-- name: deregister
-- A frontend stops: its row goes, the tunnels it held are lost from now on.
-- acts: not_live
with gone as (
    delete from instances where id = %(id)s returning id
)
update node_connections set owner_instance_id = '', disconnected_at = now() where owner_instance_id = %(id)s;

-- name: sweep
-- Dead frontends go, never the one that sweeps; the tunnels they held are lost from now on.
-- acts: not_live
with swept as (
    delete from instances
    where id <> %(self)s and last_seen <= now() - make_interval(secs => %(window)s) returning id
), lost as (
    update node_connections set owner_instance_id = '', disconnected_at = now()
    where owner_instance_id in (select id from swept)
)
select id from swept;

-- name: peer_token_hash
-- What a peer that names itself by this id must know.
select peer_token_hash from instances where id = %(id)s;

-- name: live
-- One live frontend.
select id, advertised_addr, version, last_seen from instances
where id = %(id)s and last_seen > now() - make_interval(secs => %(window)s);

-- name: all
-- Every frontend, and whether it is live.
select id, advertised_addr, version, last_seen,
       last_seen > now() - make_interval(secs => %(window)s) as is_live
from instances order by id;
