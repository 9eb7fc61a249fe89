// Light and dark theme: the system's preference, until the reader changes it.

const theme = {
  root: document.documentElement,
  system: matchMedia("(prefers-color-scheme: dark)"),
  key: "mil-ane-passes-theme",

  start() {
    this.show(this.kept() || (this.system.matches ? "dark" : "light"));
    this.system.addEventListener("change", () => this.kept() || this.show(this.system.matches ? "dark" : "light"));
    byId("theme").addEventListener("click", () => {
      const next = this.root.dataset.theme === "dark" ? "light" : "dark";
      this.keep(next);
      this.show(next);
    });
    addEventListener("beforeprint", () => {
      this.before = this.root.dataset.theme;
      this.show("light");
    });
    addEventListener("afterprint", () => this.show(this.before));
  },

  show(name) {
    this.root.dataset.theme = name;
    byId("theme").textContent = name === "dark" ? "Light theme" : "Dark theme";
    tell("theme");
  },

  kept() {
    try {
      return localStorage.getItem(this.key);
    } catch {
      return null;
    }
  },

  keep(name) {
    try {
      localStorage.setItem(this.key, name);
    } catch {
      /* a page from a file may have no storage */
    }
  },

  colour(name) {
    return getComputedStyle(this.root).getPropertyValue(`--${name}`).trim();
  },
};
