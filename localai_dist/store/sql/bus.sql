-- Broadcast between frontends: notifications, and the payloads that are too long for one. Source: wire contract §8.

-- name: notify
-- Everything in one notification.
select pg_notify(%(channel)s, %(message)s);

-- name: spill
-- A payload that is too long, and the notification that names its row: committed together, so that whoever hears of the
-- row finds it.
with spilled as (
    insert into bus_messages (id, subject, payload) values (%(id)s, %(subject)s, %(payload)s) returning id
)
select pg_notify(%(channel)s, %(message)s) from spilled;

-- name: payload
-- What a notification could not carry.
select payload from bus_messages where id = %(id)s;

-- name: sweep
-- Payloads that everybody has had the time to read.
-- acts: expired
delete from bus_messages where created_at < now() - make_interval(secs => %(retention)s);

-- name: end_ghosts
-- Backends of this very process that listen no more: the server may not know yet that a link was cut.
select pg_terminate_backend(pid) from pg_stat_activity
where application_name = %(application_name)s
  and backend_start < (select max(backend_start) from pg_stat_activity where application_name = %(application_name)s);

-- name: unblock
-- Listeners that took nothing for long while the queue of notifications fills: a full one would fail everybody's
-- publishing. A frontend that wakes up connects anew and is told that it missed something.
select pg_terminate_backend(pid) from pg_stat_activity
where pg_notification_queue_usage() > %(usage)s
  and application_name like %(prefix)s and wait_event = 'ClientWrite'
  and state_change < now() - make_interval(secs => %(silence)s);
