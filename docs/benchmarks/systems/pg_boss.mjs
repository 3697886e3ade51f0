// pg-boss: a queue by name, a payload of JSON.

import * as packaged from "pg-boss";
import { readFile } from "node:fs/promises";
import { main } from "./protocol.mjs";

const PgBoss = packaged.PgBoss ?? packaged.default;
const QUEUE = "handle";

async function started(url, options = {}) {
  const boss = new PgBoss({ connectionString: url, ...options });
  boss.on("error", (error) => console.error(error));
  await boss.start();
  return boss;
}

async function versions() {
  const found = {};
  for (const name of ["pg-boss", "pg"]) {
    const text = await readFile(new URL(`node_modules/${name}/package.json`, import.meta.url));
    found[name] = JSON.parse(text).version;
  }
  return { ...found, node: process.versions.node };
}

// Two of these run, so that the server is busy while one of them handles its jobs.
async function loop(boss, meter) {
  for (;;) {
    const jobs = await boss.fetch(QUEUE, { batchSize: 500 });
    if (!jobs.length) {
      await new Promise((resolve) => setTimeout(resolve, 50));
      continue;
    }
    await Promise.all(jobs.map((job) => meter.handle(job.data)));
    await boss.complete(QUEUE, jobs.map((job) => job.id));
  }
}

await main({
  async prepare({ url, tuned }) {
    const boss = await started(url);
    await boss.createQueue(QUEUE, tuned ? { notify: true } : {});
    return {
      remaining: "SELECT 1 FROM pgboss.job WHERE state < 'completed' AND start_after <= now()",
      versions: await versions(),
      finish: "UPDATE pgboss.job SET state = 'completed', completed_on = now()",
      lock: "SELECT 1 FROM pgboss.job WHERE state = 'created' ORDER BY priority DESC, created_on, id LIMIT 1 FOR UPDATE",
    };
  },

  async open({ url }) {
    const boss = await started(url, { max: 1, supervise: false, schedule: false });
    return async (jobs, { way, priority, delay }) => {
      // Higher priorities come first.
      const options = { priority: -(priority ?? 0), ...(delay ? { startAfter: delay } : {}) };
      if (way === "one") {
        for (const job of jobs) await boss.send(QUEUE, job, options);
      } else {
        await boss.insert(QUEUE, jobs.map((data) => ({ data, ...options })));
      }
    };
  },

  async work({ url, tuned, handler }, meter) {
    const boss = await started(url, tuned ? { useListenNotify: true } : {});
    await meter.waitForGo();
    if (tuned && handler !== "stamp") {
      await Promise.all([loop(boss, meter), loop(boss, meter)]);
    } else {
      const best = { batchSize: 500, burstWhenBatchFull: true, localConcurrency: 2 };
      await boss.work(QUEUE, tuned ? best : {}, async (jobs) => {
        await Promise.all(jobs.map((job) => meter.handle(job.data)));
      });
    }
  },
});
