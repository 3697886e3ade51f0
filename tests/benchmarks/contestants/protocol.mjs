// What every contestant written for Node speaks; protocol.py tells what that is.

import { createInterface } from "node:readline";

export const FIELDS = [
  "recipient", "subject", "note", "reference", "language", "account", "amount", "share", "urgent", "sent",
];
const SLEEP_MS = 50;

export function tell(event, values = {}) {
  process.stdout.write(JSON.stringify({ event, ...values }) + "\n");
}

const now = () => (performance.timeOrigin + performance.now()) / 1000;
const wait = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

export function payloads(number, first = 0) {
  const sent = now();
  return Array.from({ length: number }, (_, offset) => {
    const index = first + offset;
    return {
      recipient: `user${index}@example.com`,
      subject: "Your order is on its way",
      note: "left at the door, as agreed",
      reference: index.toString(16).padStart(32, "0"),
      language: "en",
      account: index % 5000,
      amount: 1999,
      share: 0.25,
      urgent: false,
      sent,
    };
  });
}

class Meter {
  constructor(handler, lines, reportEvery = 0.02) {
    this.handler = handler;
    this.reportEvery = reportEvery;
    this.lines = lines;
    this.jobs = 0;
    this.stamps = [];
  }

  read(payload) {
    let sent;
    for (const field of FIELDS) sent = payload[field];
    if (this.handler === "stamp") this.stamps.push([sent, now()]);
    this.jobs += 1;
  }

  // Only a handler that waits is asynchronous.
  handle(payload) {
    if (this.handler === "sleep") return wait(SLEEP_MS).then(() => this.read(payload));
    this.read(payload);
  }

  async waitForGo() {
    tell("ready");
    const line = await this.lines.next();
    if (line.done || line.value !== "go") process.exit(0);
    const cpu = process.cpuUsage();
    let told = 0;
    setInterval(() => {
      if (this.jobs !== told) {
        told = this.jobs;
        tell("count", { jobs: told, time: now(), stamps: this.takeStamps() });
      }
    }, this.reportEvery * 1000);
    this.lines.next().then(() => {
      const used = process.cpuUsage(cpu);
      tell("end", {
        jobs: this.jobs,
        cpu: (used.user + used.system) / 1e6,
        peak_kib: process.resourceUsage().maxRSS,
        stamps: this.takeStamps(),
      });
      process.stdout.write("", () => process.exit(0));
    });
  }

  takeStamps() {
    const taken = this.stamps;
    this.stamps = [];
    return taken;
  }
}

export async function main(adapter) {
  const [verb, text] = process.argv.slice(2);
  const options = JSON.parse(text);
  const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
  if (verb === "prepare") {
    tell("prepared", await adapter.prepare(options));
    process.exit(0);
  } else if (verb === "enqueue") {
    await serveOrders(await adapter.open(options), lines);
    process.exit(0);
  } else if (verb === "work") {
    await adapter.work(options, new Meter(options.handler ?? "read", lines, options.report_every));
  } else {
    throw new Error(`no verb of a contestant: ${verb}`);
  }
}

async function serveOrders(enqueue, lines) {
  tell("ready");
  let first = 0;
  for (;;) {
    const { value, done } = await lines.next();
    if (done) return;
    const order = JSON.parse(value);
    const begun = performance.now();
    for (let start = 0, number = 0; start < order.jobs; start += order.chunk, number += 1) {
      const late = begun + number * (order.interval ?? 0) * 1000 - performance.now();
      if (late > 0) await wait(late);
      await enqueue(payloads(Math.min(order.chunk, order.jobs - start), first + start), order);
    }
    first += order.jobs;
    tell("enqueued", { jobs: order.jobs, seconds: (performance.now() - begun) / 1000 });
  }
}
