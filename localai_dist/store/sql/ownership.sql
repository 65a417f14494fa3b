-- Which frontend holds a node's tunnel. Source: wire contract §7.

-- name: claim
-- Take the tunnel of a node: the last claim wins the row, with an epoch nobody else ever had.
-- acts: none
insert into node_connections (node_id, owner_instance_id, epoch, connected_at, disconnected_at)
values (%(node)s, %(instance)s, nextval('node_connection_epochs'), now(), null)
on conflict (node_id) do update set
    owner_instance_id = excluded.owner_instance_id, epoch = excluded.epoch,
    connected_at = excluded.connected_at, disconnected_at = null
returning epoch;

-- name: reclaim
-- Take a tunnel back whose holder was taken for dead: only if nobody claimed the node since, so that a frontend that
-- was frozen and wakes up never takes a tunnel that moved meanwhile.
-- acts: none
insert into node_connections (node_id, owner_instance_id, epoch, connected_at, disconnected_at)
values (%(node)s, %(instance)s, nextval('node_connection_epochs'), now(), null)
on conflict (node_id) do update set
    owner_instance_id = excluded.owner_instance_id, epoch = excluded.epoch,
    connected_at = excluded.connected_at, disconnected_at = null
where node_connections.epoch = %(epoch)s
returning epoch;

-- name: adopt
-- Take the nodes among these that nobody owns: their tunnel is held by this frontend all the same, because a second
-- tunnel of the node came and went elsewhere and its end is the last thing the row knows.
-- acts: none
update node_connections set
    owner_instance_id = %(instance)s, epoch = nextval('node_connection_epochs'),
    connected_at = now(), disconnected_at = null
where node_id = any(%(nodes)s) and owner_instance_id = ''
returning node_id, epoch;

-- name: release
-- Give a tunnel up: only the very claim that is named, by equality.
-- acts: fenced
update node_connections set owner_instance_id = '', disconnected_at = now()
where node_id = %(node)s and owner_instance_id = %(instance)s and epoch = %(epoch)s;

-- name: presence
-- Where the named nodes are: one row each, owner and address only of a live owner. A held row is never departed,
-- whatever its old stamp says; a row whose owner died and was not yet swept is reconnecting.
select asked.node_id, coalesce(n.name, '') as name,
       case when c.node_id is null then 'never_dialled'
            when i.id is not null then 'connected'
            when c.owner_instance_id = '' and c.disconnected_at < now() - make_interval(secs => %(grace)s)
                then 'departed'
            else 'reconnecting' end as state,
       i.id as owner, i.advertised_addr as address, c.epoch, c.connected_at,
       case when c.owner_instance_id = '' then c.disconnected_at end as disconnected_at,
       case when c.owner_instance_id = '' then c.disconnected_at + make_interval(secs => %(grace)s) end as grace_ends_at,
       case when c.owner_instance_id = ''
            then extract(epoch from c.disconnected_at + make_interval(secs => %(grace)s) - now())::float8
            end as grace_left
from unnest(%(nodes)s::varchar[]) as asked (node_id)
left join backend_nodes n on n.id = asked.node_id
left join node_connections c on c.node_id = asked.node_id
left join instances i on i.id = c.owner_instance_id and c.owner_instance_id <> ''
    and i.last_seen > now() - make_interval(secs => %(window)s);

-- name: held_by
-- The rows one frontend owns.
select node_id, epoch from node_connections where owner_instance_id = %(instance)s;
